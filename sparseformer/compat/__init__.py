"""Other packages' names and signatures on this project's functions, one module per package."""
