"""How does training begin where no process can hold the whole module? Values are made late, where they are needed.

    tape        remembers how tensors were made, without making them, and makes any of them later
    building    lets the user's constructor run on such tensors
    pending     parameters that have no values yet
    values      which of them a rank makes, and whether all ranks would make the same
"""
