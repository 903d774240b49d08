"""Bookkeeping of pages; it does not depend on tiers or managers."""
