"""A recording double of a machine with GPUs, and the proof by its log that nothing is read or written too early.

The devices are torch's gpudouble:0 to 15. Their streams, events and memory behave as those of CUDA, except that
work is done at once by the thread that enqueues it; what every operation reads and writes is written down. The real
operators, ring loops and transports run on it, with ranks that are threads. checker.py decides from the log whether any
two accesses to the same bytes, one of them a write, might have happened at the same time on a real machine.

torch can hold one PrivateUse1 backend, and it changes what other tests see: the double lives in a process of its own,
see worker.py.
"""
