"""Seeded chaos testing: draw scripts, run them, shrink failing ones, replay them."""
