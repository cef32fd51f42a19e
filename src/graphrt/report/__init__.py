"""What happened, for people and for other programs: counters, tables, a page, Prometheus.

This room knows events and batches only. Everything in it follows from the stream of events, so it
works as well on a stream that was recorded elsewhere.
"""
