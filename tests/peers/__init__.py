"""How to get the numbers of other trainers with the functions of jaxrl, one recipe a function."""
