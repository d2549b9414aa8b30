"""Copies between tiers: merged, ordered by their slots, carried out, awaited layer by layer."""
