mkdir data
