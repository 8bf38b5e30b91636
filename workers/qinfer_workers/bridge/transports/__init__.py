"""Connections to other queues: AMQP 0-9-1, and every transport of kombu."""
