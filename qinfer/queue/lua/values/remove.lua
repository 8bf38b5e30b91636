-- Removes values. KEYS: the values. Returns the names of the objects that they referred to.
local gone = {}

for i = 1, #KEYS do drop(KEYS[i], gone) end
return gone
