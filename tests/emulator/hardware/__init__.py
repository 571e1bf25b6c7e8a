"""The emulator against a GPU: every launch of a test is repeated there from the same memory, and the results compared.

    RINGATTN_HARDWARE=1 python -m pytest tests/emulator tests/cuda
    RINGATTN_HARDWARE=fake ...       the same without a GPU: the emulator once more, with other addresses and schedules

The run fails if results differ. It ends with a summary: how many launches were compared and how (bit for bit, or
within the bounds of inexact.py), how many were left out and why, and which instructions of the emulator no compared
launch executed. A launch is left out if the emulator refuses it, if the GPU cannot run its architecture, if the caller
says that results may differ (`undefined=` of Module.launch), or if it executed what inexact.py calls undefined and
differs. Kernels that trap or fail an assertion must fail on the GPU too.

driver.py wraps libcuda; pointers.py translates addresses; job.py runs one launch; worker.py keeps the GPU in a process
of its own; compare.py and inexact.py judge; record.py keeps the books; plugin.py is pytest's side; fake.py is no GPU.
"""
