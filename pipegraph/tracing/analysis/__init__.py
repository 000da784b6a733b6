"""The analysis of a recorded run: pure functions over its spans.

RecordedRun ─▶ MeasuredStep[] ─▶ MeasuredTimes ─┬▶ idle time by cause, of each rank
                     │                          ├▶ advice: changes, each with its expected gain
                     └▶ critical path           └▶ measured against predicted
"""
