"""Carries out requests: runs the planner's decisions as copies and tasks on one event loop."""
