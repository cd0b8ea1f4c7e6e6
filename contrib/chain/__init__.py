"""Task of the base model `models/chain-tiny`: a hard tail that training reaches."""
