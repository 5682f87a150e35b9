echo seven > seven.txt
