"""The CPU reference: the real protocol between ranks, with the torch bodies of `megamoe.stages`.

backend    ReferenceBackend: what it runs, and its plans
plan       what it decides about a problem
opening    sessions from plans: who has which memory
session    ReferenceSession: one forward = the programs of megamoe.schedule, driven to their end
executor   what one rank does for each op of a program
driver     runs programs on threads, waits with a time-out, notices failed ranks
memory     the arrays of a workspace as tensors
weights    experts as FP32 operands

staged     the same numbers in one process without a protocol: what GPU backends are compared with
oracle     the exact layer: nothing is rounded but the weights
"""
