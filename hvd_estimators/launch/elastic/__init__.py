"""`run_elastic`: launches of one job after another, and the states that outlive them."""
