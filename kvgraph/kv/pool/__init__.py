"""The bookkeeping of pages; it knows of no tier and of no manager."""
