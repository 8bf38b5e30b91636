"""The bridge: takes messages from a queue that a team has already, and publishes the predictions."""
