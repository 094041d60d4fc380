"""How is one run built, trained, resumed and evaluated? Also collecting data, and waiting for trackers."""
