"""How does one run go? It is built, trained, resumed, evaluated; its data is collected and its trackers are served."""
