"""Which requests run together, and when: a pure policy and the machine around it."""
