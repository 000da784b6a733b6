"""What a recorded run tells: pure functions over its spans.

RecordedRun ─▶ MeasuredStep[] ─▶ MeasuredTimes ─┬▶ bubble by cause, of each rank
                     │                          ├▶ advice, each with its expected gain
                     └▶ critical path           └▶ measured against predicted
"""
