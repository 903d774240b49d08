"""Tiers below the device memory: host, disk and remote stores of pages."""
