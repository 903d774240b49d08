"""Cache bookkeeping: integers, and the memory that a session hands over as opaque buffers."""
