"""Model repositories: Triton's layout and `config.pbtxt`, read into `ModelSpec`s. Begin with `open`."""
