"""Object stores and directories: one `Store` for models, large payloads and the parts of bulk jobs.

Begin with `store`, the port; `open` chooses the driver.
"""
