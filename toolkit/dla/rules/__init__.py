"""What the DLA takes: one row per limit, and the judge that applies them."""
