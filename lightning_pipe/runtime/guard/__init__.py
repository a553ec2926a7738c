"""Watch over a rank from a process of its own, so that no death and no hang of any rank goes unheard.

    rank 0 ══ guard 0: hub ─────┬───── guard 1 ══ rank 1           ══ page of shared memory, and a pair of sockets
                                └───── guard 2 ══ rank 2           ── TCP

A guard is a small Python process without torch. It reads from a page of memory what its rank does, so it knows the last
instruction of a rank that was killed or stopped; it tells the hub, which tells everybody else; and it ends its rank if
that does not end by itself once any rank has failed. No thread of a rank has to be well for any of this.

    page.py        what a rank does, in shared memory
    failure.py     what went wrong first
    hub.py         who decides that, in the guard of rank 0
    process.py     the loop of a guard
    pids.py        how a process has ended, and how it is ended
    client.py      the rank's side: start a guard, talk with it

The guard's side imports the standard library only: it is started without site-packages.
"""
