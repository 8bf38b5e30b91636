# What qinfer uses of py-amqp, which has no types of its own.
