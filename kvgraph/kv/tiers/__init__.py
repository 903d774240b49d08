"""Tiers: pages that outlive the device, the process and the machine."""
