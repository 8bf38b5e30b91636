"""The FastAPI routes. Begin with `services`, which all routes share, and `infer`."""
