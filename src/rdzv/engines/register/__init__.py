"""An engine in one compare-and-set register: the whole reference engine as one value.

`driver` and `swap_loop` do the work, `document` is the value, `expiry` judges leases, `backend` is the interface of a
register, and `file` is a register in a shared directory.
"""
