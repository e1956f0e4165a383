"""Repeat a function of tensors without Python between its operations: record it once, then replay its tape.

    record.py    the operations that a function runs on its inputs: the tape
    rewrite.py   fewer operations: dead ones go, maps of one input become one product
    calls.py     an operation as calls that write into a buffer: numpy where it has less overhead, torch elsewhere
    program.py   a tape with fixed buffers: a list of calls

On a CPU a small operation of torch takes a microsecond, and the Python around it ten. A tape keeps the operations only:
checks are not repeated, views are made once, and what depends on constants alone is computed once.
"""
