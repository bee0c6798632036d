"""Benchmarks: routings, suites, result rows, floors, and the tables and plots made of them.

routing                      where tokens go, by name
suites, reference_suite      what is measured
results                      a measurement as a JSON row
roofline                     what can't be beaten
report                       Markdown tables and plots
"""
