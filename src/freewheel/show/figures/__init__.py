"""Figures of runs, the same in a report and on the dashboard."""
