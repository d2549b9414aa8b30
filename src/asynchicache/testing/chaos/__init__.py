"""The seeded search for what must never happen: scripts drawn, carried out, cut down, replayed."""
