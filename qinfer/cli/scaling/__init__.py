"""`qinfer autoscale`: starts and drains workers as the work asks. Begin with `scaler`."""
