"""Python functions and classes as served models.

    declare      `@qinfer.model` and its options
    frameworks   objects of scikit-learn, PyTorch, … as classes with such hints
    hints        type hints ──▶ signature: the inputs and outputs of a function       (pure)
    values       arrays of a batch ◀──▶ Python values                              (pure)
    runner       calls a function with the values of requests
    hosted       the model of the host process: Triton's `execute`, by a runner
    app          imports an app's file and lists its models; `examine` does so in a child process
    repository   signature ──▶ configuration, as a repository of generated model directories

Gateways and workers never import an app: they read the generated configuration, and the host process imports it.
"""
