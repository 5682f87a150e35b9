grep -l gold *
rm fig.txt
