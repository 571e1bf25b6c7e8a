"""Rings of real processes, and what can happen to them. Tests use cases, runner and promises.

runner    one process has torch imported, and forks a leader for every case
leader    forks the ranks, does to them what only another process can, and collects what they say
rank      a rank: a call to compare with, the call under the fault, the next one, a new group
jobs      what ranks do in cases without a fault: fork, call from two threads, break many groups
inject    what a rank does to itself at a moment of a pass: dies, stops, waits, raises
links     network links that can be cut, slowed down, or fail with an error of the system
cases     the faults, the phases of a pass, and which of their combinations run
census    what a process holds that it may forget to give back
promises  what must hold afterwards, one function for each promise
"""
