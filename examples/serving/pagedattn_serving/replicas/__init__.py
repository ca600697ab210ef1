"""Several engines behind one web server, on Ray Serve."""
