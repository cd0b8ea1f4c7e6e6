"""Task of the base model `models/lookup-tiny`: episodes of many turns in which two tools give what the model lacks."""
