"""Tests of any backend; docs/testing.md says how to run them.

test_matrix     numbers of every case of the table: outputs, stage taps, receive counts
test_bits       when the same bits are promised
test_calls      arguments of `forward`
test_values     NaN, Inf, extremes, scales
test_weights    weight types, layouts, in-place moves
test_plans      plans, configurations, refusals
test_sessions   life of a session
test_protocol   many calls, late and dead ranks, wrap-around
test_graphs     capture and replay
"""
