"""Connections to other queues: AMQP 0-9-1, and every transport of kombu. Begin with `base`, the port."""
