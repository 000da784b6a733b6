"""What the planner predicts beside what two processes take: of stages, of steps, and of its cut against every other.

    python -m benchmarks.planner --hardware hardware.json --json planner.json

`pipegraph calibrate -o hardware.json --threads 1` writes the profile of the roofline.
"""
