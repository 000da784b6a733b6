"""The planner's predictions compared with measurements on two processes: stages, steps, and its cuts.

    python -m benchmarks.planner --hardware hardware.json --json planner.json

`pipegraph calibrate -o hardware.json --threads 1` writes the profile of the roofline.
"""
