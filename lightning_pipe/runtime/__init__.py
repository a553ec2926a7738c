"""Run a verified program on real ranks.

    transport = process_group_transport(device, deadline_s=300)            transport/process_group.py
    agree({"plan": ..., "graph": ..., "program": ...})                     agree.py
    connect(transport, [program, ...])                                     groups.py
    guard = guard_of_this_process()                                        guard/client.py
    guard.begin(rank, PATIENCE.limits)                                     guard/, a process that watches over this one
    watch = GuardedWatch(guard, rank=rank, ranks=ranks)                    guarded_watch.py
    state = State(parameters, buffers, device)                             stage.py
    executor = Executor(split, layout, state=state, transport=transport, loss=..., step=...)
    outcome = executor.run(program, Job(leaves, cut, offsets, weight, seed, step), watch=watch)    executor.py, job.py
    results = Results(split, layout, transport=transport, device=device)                           results.py
    with watch.program(step):
        collected = drive(results.collect(program, outcome.results, names, votes={}), wait=watch.wait)     waiting.py

In one process and thread: `Hub().endpoint(rank)` is the transport of a rank, `run_together(executors, program, jobs)`
runs a program, `drive_together([results.collect(...), ...])` gives the outputs to all ranks.
"""
