"""HTTP: routes, bodies bounded and decompressed, the key checked, long polls."""
