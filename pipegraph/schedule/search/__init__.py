"""Orders that are better than the published ones for given times and memory.

seeds: named schedules, greedy orders ──▶ the best of them ──▶ climb over skeletons ──▶ climb over whole orders
"""

from __future__ import annotations

from pipegraph.schedule.search.search import SearchedSchedule, search

__all__ = ["SearchedSchedule", "search"]
