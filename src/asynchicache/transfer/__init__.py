"""Copies between tiers: merged, ordered by their slots, run, awaited layer by layer."""
