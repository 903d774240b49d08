"""The disk tier: pages in a folder that processes share."""
