"""What `qinfer doctor` looks at: each module has the findings about one thing."""
