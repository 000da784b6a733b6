"""What people look at: tables of a package, its comparison with the model, and what its steps cost."""
