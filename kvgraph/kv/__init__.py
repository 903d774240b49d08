"""Cache bookkeeping over integers, and over memory that a session provides as opaque buffers."""
